"""A small reinforcement-learning run whose weights are worth publishing.

The demo needs neither network nor GPU: text, tokenizer and model are made on the spot, the model is
trained on that text until its weights look like trained ones, and TRL's own GRPO trainer then goes
on from there with a publisher attached. The parts know nothing of chains and stores; the command
line puts them together.
"""
