"""Parts of Hubring that a test moves by hand, and a GPU that is not there."""
