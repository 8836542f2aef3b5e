"""The web page: `samecurve ui` serves runs, forms and a queue of jobs to one person's browser.

The server reads files and starts processes. It holds nothing that a run needs: whoever kills it
changes no run and no job, and the next server finds them all.
"""
