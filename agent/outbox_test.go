package agent

import "testing"

func TestOutboxKeepsRoomForCompletions(t *testing.T) {
	o := newOutbox(8)
	if n := cap(o.answers); n != 4 {
		t.Fatalf("%d answers may wait, want half of the queue", n)
	}
	for i := range 8 {
		if !o.push(i) {
			t.Fatalf("no room for message %d", i)
		}
	}
	if o.push(99) {
		t.Fatal("the queue takes more than its limit")
	}
}
