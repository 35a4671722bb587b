"""The rules of HTTP, independent of any framework or server."""
