package replay

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/kvagent/kvagent/mockengine"
)

// TestKilledBetweenStretches kills an engine when its stretch is over, with requests that continue
// in the next one, and expects it to be given them again with that.
func TestKilledBetweenStretches(t *testing.T) {
	var sent bytes.Buffer
	e := &engine{
		encode: json.NewEncoder(&sent), unfinished: map[uint64]mockengine.Request{5: {ID: 5}},
	}
	r := &replay{engines: []*engine{e}}
	r.again(e)
	if sent.Len() != 0 {
		t.Fatalf("sent between two stretches: %s", sent.String())
	}
	e.send(&mockengine.Command{Op: "run", Requests: []mockengine.Request{{ID: 6}}})
	var c mockengine.Command
	if err := json.NewDecoder(&sent).Decode(&c); err != nil {
		t.Fatal(err)
	}
	if len(c.Requests) != 2 || c.Requests[0].ID != 5 || c.Requests[1].ID != 6 {
		t.Errorf("the next stretch has the requests %+v, want 5 and 6", c.Requests)
	}
}

// TestKilledAfterTheLastStretch kills an engine that has been told to leave, and expects the next
// incarnation to be told so too.
func TestKilledAfterTheLastStretch(t *testing.T) {
	var sent bytes.Buffer
	e := &engine{encode: json.NewEncoder(&sent)}
	e.leave()
	sent.Reset() // it was killed before it read that
	(&replay{engines: []*engine{e}}).again(e)
	var c mockengine.Command
	if err := json.NewDecoder(&sent).Decode(&c); err != nil || c.Op != "leave" || !e.wanted {
		t.Errorf("the next incarnation was told to %q, its end is intended: %v; %v", c.Op, e.wanted, err)
	}
}
