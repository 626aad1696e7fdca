"""Demo: a small reinforcement-learning run with published weights.

The demo needs neither network nor GPU. It generates text, tokenizer and model, pretrains the model
on the text until its weights resemble trained ones, and continues with TRL's GRPO trainer and an
attached publisher.
"""
