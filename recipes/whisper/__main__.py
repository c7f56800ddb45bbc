from recipes.common.command import run
from recipes.whisper.run import main

run("whisper", main)
