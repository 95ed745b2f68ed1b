"""specdec_lab: compare speculative decoding strategies on one verifier."""
