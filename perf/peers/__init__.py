"""What ucxkv is compared with, each behind the same two classes, `Owner` and `Puller`."""
