"""The parts of an attention: contractions, scores, probabilities, operands."""
