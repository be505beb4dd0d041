"""How drills and suites are run, judged and recorded."""
