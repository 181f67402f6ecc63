"""The same parts over RPC: rows in processes that host shards, clients that use them."""
