package events

import (
	"fmt"
	"slices"
	"testing"
)

// pair is a chain of two blocks in memory, of which a subscriber was told.
func pair(t *testing.T) (l *ledger, c *cursor, first, second uint32) {
	l, c = newLedger(0, blockTokens, defaultLimits()), &cursor{next: 1}
	tokens := make([]byte, l.stride)
	first, _ = l.add([]byte("block 1"), nil, tokens, nil)
	second, _ = l.add([]byte("block 2"), []byte("block 1"), tokens, nil)
	l.set(first, 1)
	l.set(second, 1)
	if got := told(l, c); len(got) != 1 {
		t.Fatalf("%q, want one run", got)
	}
	return l, c, first, second
}

// told returns the runs that a subscriber is told.
func told(l *ledger, c *cursor) (all []string) {
	list, _ := l.take(1, c, &room{100, maxBatchBytes, maxLooks}, nil)
	for _, r := range runs(list) {
		all = append(all, fmt.Sprint(r.stored, r.medium, r.blocks))
	}
	return all
}

// TestMoveIsStoredFirst: a block that moves is never gone.
func TestMoveIsStoredFirst(t *testing.T) {
	l, c, _, second := pair(t)
	l.set(second, 2)
	want := []string{fmt.Sprint(true, 1, []uint32{second}), fmt.Sprint(false, 0, []uint32{second})}
	if got := told(l, c); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestRunsKeepTheOrder: a block that comes back to a medium is not told so before it has left.
func TestRunsKeepTheOrder(t *testing.T) {
	l, _, first, second := pair(t)
	list := []event{{l, first, 1, true}, {l, second, 1, false}, {l, second, 1, true}}
	if got := runs(list); len(got) != 3 || got[1].stored || got[2].n != second {
		t.Errorf("%+v, want three runs", got)
	}
}
