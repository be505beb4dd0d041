"""The live page: its server, and the three files that a browser loads from it, without a build step.

`memstore page` starts it. What is drawn is decided in `core/report/page.py`; here are only asked and sent.
"""
