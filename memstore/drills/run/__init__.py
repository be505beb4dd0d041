"""The runner of one drill, and the suite of several: played, judged and recorded.

The phases, and the hooks in each, in their order; a MemstoreError leads to cleanup at once, with the outcome ERROR:

    setup              the ranks put, all copies are there; scene.setup; safety check; flow.setup
    inject             flow.inject: (GoesOn: scene.begin_puts), scene.inject
    wait-for-effect    scene.wait_for_effect; the store notices the fault (scene.detected), if it can
    recover            scene.recover; Restart: the job restarts, scene.restore; GoesOn: scene.hold_s, scene.end_puts
    wait-for-recovery  flow.wait_for_recovery: a new commit, all copies; then scene.wait_for_recovery
    check              scene.check, then flow.check
    cleanup            scene.cleanup, the job is removed, the site waits for its hosts
"""
