"""Phase 1 as pure functions: update vectors, sketches of them, and the pseudo-domains found in them."""
