"""A rank's side of its link to the holder.

It runs in the training process, and in tools that ask without joining a job (`admin_link.py`); `memstore.client` calls
it. It knows its own host's holder only; calls to the controller pass through that.

    granted --pages mapped in (pre-faulted)--> free --acquire--> a put's --submit--> the holder's
                                                '-- the put is over'
"""
