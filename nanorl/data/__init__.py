"""Data: downloads, the embedded tiny world, token files, packed conversations, prompts."""
