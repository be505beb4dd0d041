"""What travels between processes: frames, and the events and actions of the controller.

Every process imports it, and it imports no other room. A message is a declared class; `codec.py` turns it into bytes
and decodes foreign bytes within limits. `peer_messages.py` holder to holder, `rank_messages.py` rank and holder,
`calls.py` and `replies.py` questions to the controller, `orders.py` and `reports.py` controller and holders.
"""
