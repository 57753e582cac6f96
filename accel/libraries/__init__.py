"""Libraries of kernels of the user's own, as users see them; the engine has what runs them."""
