package agent

import (
	"testing"
	"time"
)

func TestOutboxKeepsRoomForCompletions(t *testing.T) {
	o := newOutbox(8)
	gone := make(chan struct{})
	for i := range 4 {
		if !o.answer(i, gone) {
			t.Fatal("no room in an empty queue")
		}
	}
	if o.add(99, o.limit/2) {
		t.Fatal("an answer was taken into a queue that is half full")
	}
	for i := range 4 {
		if !o.push(10 + i) {
			t.Fatalf("no room for completion %d", i)
		}
	}
	if o.push(99) {
		t.Fatal("the queue takes more than its limit")
	}
	batch, closed := o.take(nil)
	if len(batch) != 8 || closed || batch[0] != 0 || batch[7] != 13 {
		t.Fatalf("took %v, %v", batch, closed)
	}
	if o.push(99) {
		t.Fatal("what is taken and not written counts no more")
	}
	answered := make(chan bool)
	go func() { answered <- o.answer(20, gone) }()
	for range batch {
		o.written()
	}
	if !<-answered {
		t.Fatal("an answer that waited for room was not taken")
	}
	o.close()
	if batch, closed = o.take(batch); len(batch) != 1 || !closed || o.push(1) {
		t.Fatalf("after close: %v, %v", batch, closed)
	}
}

func TestAnswerEndsWithItsSession(t *testing.T) {
	o := newOutbox(2)
	gone := make(chan struct{})
	o.push(1)
	answered := make(chan bool)
	go func() { answered <- o.answer(2, gone) }()
	close(gone)
	select {
	case ok := <-answered:
		if ok {
			t.Fatal("answered into a full queue")
		}
	case <-time.After(patience):
		t.Fatal("the answer waits for ever")
	}
}
