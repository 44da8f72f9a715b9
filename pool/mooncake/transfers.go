package mooncake

import (
	"errors"
	"sync"
	"time"
)

// errNoTransfers is why a helper is replaced that is alive and answers.
var errNoTransfers = errors.New("every transfer of its client fails, and the master answers")

// Limits of a client whose transfers fail.
const (
	failingRequests = 8                // in a row, at least
	lastFailingFor  = 10 * time.Minute // Options.FailingFor grows to that, or stays if it is longer
)

// codeTransfer is the client's word for bytes that did not get to a segment or from it. The master has answered then: it was asked first where they lie.
const codeTransfer = -800

// transfers is what clients say of their transfers, so that one whose transport does not work is replaced: now and then Mooncake's client comes up like
// that, answers whatever is asked of the master, and never moves a byte. A node that is gone looks the same until the master gives it up (--client_ttl, 10 s); so
// all transfers must have failed for longer than that. Each helper that replaces another without a transfer is given twice as long.
type transfers struct {
	mu     sync.Mutex
	first  time.Duration // that they may fail
	within time.Duration // now
	failed int           // requests in a row, of this helper
	since  time.Time     // the first of them was answered
}

func newTransfers(first time.Duration) *transfers { return &transfers{first: first, within: first} }

// begin is for a new helper.
func (t *transfers) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = 0
}

// tell takes the answer to a put or a get. True: the helper is to be replaced; said once of each.
func (t *transfers) tell(op operation, codes []int64, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	moved, failed := moves(op, codes)
	switch {
	case moved:
		t.failed, t.within = 0, t.first
		return false
	case !failed:
		return false
	}
	if t.failed++; t.failed == 1 {
		t.since = now
	}
	if t.failed < failingRequests || now.Sub(t.since) < t.within {
		return false
	}
	t.failed, t.within = 0, max(t.first, min(2*t.within, lastFailingFor))
	return true
}

// tallyTransfers has a helper replaced when that is due.
func (s *Store) tallyTransfers(h *helper, op operation, codes []int64) {
	if s.transfers.tell(op, codes, time.Now()) {
		select {
		case h.useless <- struct{}{}:
		default: // it is told already
		}
	}
}

// moves says whether an answer tells of bytes that were moved, and of bytes that were not. What is there before, not there, or has no room needs no transfer.
func moves(op operation, codes []int64) (moved, failed bool) {
	for _, code := range codes {
		moved = moved || op == opPut && code == 0 || op == opGet && code > 0
		failed = failed || code == codeTransfer
	}
	return moved, failed
}
