"""Decoding methods that CLaSp is compared with; each proposes drafts through the loop of `clasp_core.decoding`."""
