"""What can only be shown with RDMA: a guest with soft RoCE, and the tests that run in it."""
