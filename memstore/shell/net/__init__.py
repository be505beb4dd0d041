"""Connections: sockets, TLS, proof of the secret, frames, pacing.

Holders, controller and ranks connect through it. Every wait has a deadline. No policy: when copies may go is
`core/send_gate`'s answer.

    accepted --proof within 5 s--> authenticated --frames--> closed
        '--wrong secret, late, too long--> closed, nothing learned
"""
