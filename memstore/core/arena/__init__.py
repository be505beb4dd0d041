"""What one host's arena holds: slots, the replicas on them, the room that jobs reserved.

The holder's procedures and `shell/arena` call it. It knows no file: who maps and writes the memory is the shell's.

    free --lease--> leased --submit--> receiving --digest--> sealed --last reference gone--> free
      '------------- offer, stage -----------^   '--abort--> free
    leased --owner proved dead--> free
    free --its pages are given back--> unbacked --they are claimed again--> free
    incoming --every chunk sealed, manifest saved--> shard --dropped, not pinned--> gone
      '--aborted--> gone                            '--dropped while pinned--> doomed --unpinned--> gone
"""
