package mooncake

import (
	"errors"
	"sync"
	"time"
)

// errNoTransfers is the reason to replace a helper that answers.
var errNoTransfers = errors.New("every transfer of its client fails, and the master answers")

// Limits of a client whose transfers fail.
const (
	failingRequests = 8                // in a row, at least
	lastFailingFor  = 10 * time.Minute // Options.FailingFor grows up to this, unless it is longer
)

// codeTransfer is the client's code for a failed transfer to or from a segment. The master has
// answered: it is asked first where the bytes are.
const codeTransfer = -800

// transfers records the outcome of a helper's transfers, to replace a helper whose transport does
// not work: Mooncake's client sometimes starts up so that it answers everything that concerns the
// master alone, but never moves a byte. A dead node looks the same until the master drops it
// (--client_ttl, 10 s), so all transfers must fail for longer than that. The time doubles with each
// helper that is replaced without a successful transfer.
type transfers struct {
	mu     sync.Mutex
	first  time.Duration // limit of the first helper
	within time.Duration // current limit
	failed int           // requests in a row, of this helper
	since  time.Time     // when the first of them was answered
}

func newTransfers(first time.Duration) *transfers { return &transfers{first: first, within: first} }

// begin resets the count for a new helper.
func (t *transfers) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = 0
}

// record adds the answer to a put or a get. It returns true, once for each helper, if the helper is
// to be replaced.
func (t *transfers) record(op operation, codes []int64, now time.Time) bool {
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

// tallyTransfers records an answer, and has the helper replaced if all its transfers fail.
func (s *Store) tallyTransfers(h *helper, op operation, codes []int64) {
	if s.transfers.record(op, codes, time.Now()) {
		select {
		case h.replace <- struct{}{}:
		default: // it is to be replaced already
		}
	}
}

// moves reports whether an answer shows transfers that succeeded and transfers that failed. A value
// that exists already, does not exist, or has no room needs no transfer.
func moves(op operation, codes []int64) (moved, failed bool) {
	for _, code := range codes {
		moved = moved || op == opPut && code == 0 || op == opGet && code > 0
		failed = failed || code == codeTransfer
	}
	return moved, failed
}
