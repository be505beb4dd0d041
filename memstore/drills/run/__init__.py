"""The runner of one drill, and the suite of several: played, judged and recorded."""
