#!/usr/bin/env bash
# From a CSV file to served predictions: examples/tour.sh FOLDER. Needs the command `hybrid`: source .venv/bin/activate.
# It takes a minute; the times in the comments are for two busy cores.
set -euo pipefail
mkdir -p "$1"
cd "$1"

# 1. Data: a header, one row per sample, and a column of labels. Replace clicks.csv by your file.
clicks() { # NUM_ROWS SEED: users click on cheap items, and on items that match them
    awk -v rows="$1" -v seed="$2" 'BEGIN {
        srand(seed)
        print "clicked,price,user,item,tags"
        for (i = 0; i < rows; i++) {
            user = int(200 * rand()); item = int(50 * rand()); price = (item * 7) % 50 + rand()
            odds = 1.5 - price / 15 + 2 * (user % 5 == item % 5)
            print (rand() < 1 / (1 + exp(-odds))) "," price ",u" user ",i" item ",t" item % 5 "|t" item % 3
        }
    }'
}
clicks 20000 1 >clicks.csv
clicks 1000 2 >new.csv

# 2. Configuration. `hybrid config --config clicks.toml` prints all keys with their effective values.
cat >clicks.toml <<'TOML'
[run]
folder = "run"
[data]
format = "csv"
path = ["clicks.csv"]
label = "clicked"
dense = ["price"]
sparse = ["user", "item", "tags"]
multi_hot_separator = "|"
split = "random(fraction = 0.2)"
[train]
epochs = 2
batch_size = 128
update = "lookahead"
TOML

# 3. Train on two trainers and two workers. The file is encoded first, once for all runs. 17 s
#    max_steps ends the run early with a checkpoint, as Ctrl-C does.
hybrid launch --config clicks.toml --set train.max_steps=80

# 4. Resume. The result is bit-identical to the result of a run that was not stopped. 15 s
hybrid launch --resume run --set train.max_steps=0

# 5. Evaluate the best checkpoint on the test rows. 10 s
hybrid evaluate run

# 6. Serve predictions: each row of standard input is predicted as it arrives. --input FILE predicts a file. 9 s
tail -n +1 new.csv | hybrid predict run --input - --keep user,item >predictions.csv

# 7. Export a program that torch.export.load runs without this project. 8 s
hybrid export run --output export
