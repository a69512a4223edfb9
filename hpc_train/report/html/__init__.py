"""The page of ``report``: runs as one HTML file that needs no network. Nothing here imports torch."""
