"""Whole models: blocks, language-model heads, and their files."""
