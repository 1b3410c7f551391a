"""What values are, as functions of the elements of others: axes, layouts, polynomials, moments."""
