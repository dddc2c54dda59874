"""What the views of a cell, a cluster and a value show, as data: events in, plain values out; nothing is drawn here."""
