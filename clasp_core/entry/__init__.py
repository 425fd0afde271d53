"""From a command line to what a run needs: its keys, its objects, its manifest."""
