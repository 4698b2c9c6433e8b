"""Lowers the canonical model to ExecuTorch programs, proves them, and runs them."""
