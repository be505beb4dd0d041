"""What one host's arena holds: slots, the replicas on them, the room that jobs reserved.

The holder's procedures and `shell/peer` call it. It knows no file and makes no lock: memory, manifests, clock and locks
are ports (`memory_ports.py`). `replica_store.py` writes in the order of R7, so a crash loses nothing acknowledged:

    In:  bytes, digest, slot header, manifest (temporary file + rename), acknowledge
    Out: unlink the manifest, then free the slots

    free --lease--> leased --submit--> receiving --digest--> sealed --last reference gone--> free
      '------------- offer, stage -----------^   '--abort--> free
    leased --owner proved dead--> free
    free --its pages are given back--> unbacked --they are claimed again--> free
    incoming --every chunk sealed, manifest saved--> shard --dropped, not pinned--> gone
      '--aborted--> gone                            '--dropped while pinned--> doomed --unpinned--> gone
"""
