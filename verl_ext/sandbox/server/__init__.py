"""The local sandbox server: the E2B protocol over plain HTTP, for machines without a cloud key."""
