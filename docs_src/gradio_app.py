"""The word game with a Gradio tab on the web page."""

from __future__ import annotations

from typing import Any

import gradio as gr
from word_env import WordAction, WordGame, WordObservation

from openenv import create_app


def build(
    web_manager: Any, action_fields: Any, metadata: Any, is_chat_env: bool, title: str, quick_start_md: str
) -> gr.Blocks:
    """Build the page; it plays through `web_manager`."""

    async def begin() -> str:
        await web_manager.reset_environment()
        return "Guess a word of five letters."

    async def guess(word: str) -> str:
        stepped = await web_manager.step_environment({"guess": word})
        return str(stepped["observation"]["marks"])

    with gr.Blocks() as page:
        word, marks = gr.Textbox(label="Word"), gr.Textbox(label="Marks")
        gr.Button("New game").click(begin, None, marks, api_name="begin")
        word.submit(guess, word, marks, api_name="guess")
    return page


app = create_app(WordGame, WordAction, WordObservation, gradio_builder=build, custom_tab_name="Guess")
