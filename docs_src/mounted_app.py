from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from word_app import app as words


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with words.router.lifespan_context(words):
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/words", words)
