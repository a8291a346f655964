"""Who may do what: tokens, roles, the policy of every RPC, certificates."""
