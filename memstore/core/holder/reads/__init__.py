"""What a holder brings into its readers' reach, and from where.

`bring.py` carries out an order; `fetch.py` asks peers and storage; `ready.py` keeps what is brought for its reader, and
pins it once the reader takes it. It may know all of `core/holder`.
"""
