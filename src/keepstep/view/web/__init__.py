"""The page of a run: a small server that only looks (starlette, uvicorn), static files, the page as one file."""
