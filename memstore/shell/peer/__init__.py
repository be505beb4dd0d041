"""Copies of shards between holders.

The holder's effects send and fetch with `client.py`; `server.py` answers, one thread for each connection.

    offer --room taken--> chunks, batch by batch --> seal --manifest stored--> sealed
       '--no room, fenced--> refused       '--abort, silence, last connection gone--> room given back
"""
