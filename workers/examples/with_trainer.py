"""A script for the Hugging Face Trainer, without Hubring: `ps-run -np 2 --as-gloo with_trainer.py`."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
text = b"the worker pushes gradients to the hub and pulls parameters from the hub; " * 100
blocks = torch.tensor(list(text)).unfold(0, 32, 16)
dataset = [{"input_ids": block, "labels": block} for block in blocks]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=30,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"loss {metrics['eval_loss']:.6f}")
