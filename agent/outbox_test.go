package agent

import "testing"

func TestOutboxIsBounded(t *testing.T) {
	o := newOutbox(8)
	for i := range 8 {
		if !o.push(i) {
			t.Fatalf("no room for message %d", i)
		}
	}
	if o.push(99) {
		t.Fatal("the queue takes more than its limit")
	}
	batch, closed := o.take(nil)
	if len(batch) != 8 || closed || batch[0] != 0 || batch[7] != 7 {
		t.Fatalf("took %v, %v", batch, closed)
	}
	if o.push(99) {
		t.Fatal("what is taken and not written counts no more")
	}
	for range batch {
		o.written()
	}
	if !o.push(20) {
		t.Fatal("no room after all was written")
	}
	o.close()
	if batch, closed = o.take(batch); len(batch) != 1 || !closed || o.push(1) {
		t.Fatalf("after close: %v, %v", batch, closed)
	}
}
