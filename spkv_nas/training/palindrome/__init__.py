"""The SP-KV paper's toy task: reverse a list that lies outside the local window."""
