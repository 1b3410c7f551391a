"""RMSNorm and LayerNorm."""
