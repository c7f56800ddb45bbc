from recipes.common.command import run
from recipes.speech.run import main

run("speech", main)
