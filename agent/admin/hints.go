package admin

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/pool"
)

// HintRequest is the body of POST /hints: actions on the blocks of a session, on those that a
// remembered look-up did not find, or on blocks by their hashes.
type HintRequest struct {
	Session string       `json:"session,omitempty"`
	Request string       `json:"request,omitempty"` // name of a look-up, as in explain
	Space   string       `json:"space,omitempty"`   // of the blocks: its fingerprint; empty: the only open one
	Group   uint8        `json:"group,omitempty"`   // of the blocks
	Blocks  []string     `json:"blocks,omitempty"`  // hashes in hex, in the order of their chain
	Actions []HintAction `json:"actions"`
}

// HintAction is an action in HintRequest.
type HintAction struct {
	hints.Action
	Seconds float64 `json:"seconds,omitempty"` // how long, or of kv.drop after how long
}

// HintAnswer is the answer of POST and GET /hints.
type HintAnswer struct {
	Receipts []hints.Receipt `json:"receipts"`
}

// Limits of a HintRequest.
const (
	maxHintBody   = 1 << 20 // bytes
	maxHintBlocks = 8192
)

// hint serves POST /hints.
func (s *Server) hint(rw http.ResponseWriter, r *http.Request) {
	var q HintRequest
	body := json.NewDecoder(http.MaxBytesReader(rw, r.Body, maxHintBody))
	body.DisallowUnknownFields()
	err := body.Decode(&q)
	if err == nil && body.Decode(&struct{}{}) != io.EOF {
		err = errors.New("more than one JSON object")
	}
	if err != nil {
		http.Error(rw, "hints: "+err.Error(), http.StatusBadRequest)
		return
	}
	receipts, err := s.view.hint(&q)
	switch {
	case errors.Is(err, hints.ErrNoSession), errors.Is(err, history.ErrUnknown):
		http.Error(rw, err.Error(), http.StatusNotFound)
	case err != nil:
		http.Error(rw, "hints: "+err.Error(), http.StatusBadRequest)
	default:
		writeJSON(rw, HintAnswer{receipts})
	}
}

// hinted serves GET /hints: the last receipts, the newest first.
func (s *Server) hinted(rw http.ResponseWriter, _ *http.Request) {
	writeJSON(rw, HintAnswer{s.view.source.Hints.Receipts()})
}

// hint carries out a request.
func (v *View) hint(q *HintRequest) ([]hints.Receipt, error) {
	actions, err := q.actions()
	if err != nil {
		return nil, err
	}
	named := 0
	for _, given := range []bool{q.Session != "", q.Request != "", len(q.Blocks) > 0} {
		if given {
			named++
		}
	}
	if named != 1 {
		return nil, errors.New("session, request, blocks: allowed: exactly one of them")
	}
	if q.Session != "" {
		return v.source.Hints.ToldOf(q.Session, actions)
	}
	h := &hints.Hint{Actions: actions, Exact: true}
	if q.Request != "" {
		h.Space, h.Chains, err = v.prompt(q.Request)
	} else {
		h.Space, h.Chains, err = v.blocks(q)
	}
	if err != nil {
		return nil, err
	}
	return v.source.Hints.Told(h), nil
}

func (q *HintRequest) actions() (out []hints.Action, err error) {
	if n := len(q.Actions); n < 1 || n > hints.MaxActions {
		return nil, fmt.Errorf("actions: %d, allowed: 1 to %d", n, hints.MaxActions)
	}
	for i := range q.Actions {
		a := q.Actions[i].Action
		if s := q.Actions[i].Seconds; s < 0 || s > hints.MaxTime.Seconds() {
			return nil, fmt.Errorf("actions[%d].seconds: %g, allowed: 0 to %g", i, s, hints.MaxTime.Seconds())
		}
		a.For = time.Duration(q.Actions[i].Seconds * float64(time.Second))
		if err := a.Check(); err != nil {
			return nil, fmt.Errorf("actions[%d].%w", i, err)
		}
		out = append(out, a)
	}
	return out, nil
}

// prompt returns the blocks that a look-up did not find.
func (v *View) prompt(name string) (s pool.SpaceID, chains []hints.Chain, err error) {
	if v.source.Explain == nil {
		return 0, nil, fmt.Errorf("request %q: %w", name, history.ErrUnknown)
	}
	s, groups, err := v.source.Explain.Prompt(name)
	for g, h := range groups {
		if h.N > 0 {
			chains = append(chains, hints.Chain{Group: uint8(g), Hashes: h})
		}
	}
	return s, chains, err
}

// blocks returns the blocks that a request names.
func (v *View) blocks(q *HintRequest) (s pool.SpaceID, chains []hints.Chain, err error) {
	if len(q.Blocks) > maxHintBlocks {
		return 0, nil, fmt.Errorf("blocks: %d, allowed: 1 to %d", len(q.Blocks), maxHintBlocks)
	}
	var blob []byte
	for i, text := range q.Blocks {
		b, err := hex.DecodeString(text)
		if err != nil || len(b) == 0 || len(b) > pool.MaxHashLen || len(text) != len(q.Blocks[0]) {
			return 0, nil, fmt.Errorf("blocks[%d]: %q, allowed: a hash in hex, all of one length", i, text)
		}
		blob = append(blob, b...)
	}
	s, err = v.space(q.Space)
	return s, []hints.Chain{{Group: q.Group, Hashes: pool.Chain(blob, len(q.Blocks[0])/2)}}, err
}

// space returns the open space with a fingerprint, in hex; the only one if that is empty.
func (v *View) space(name string) (pool.SpaceID, error) {
	var found []pool.SpaceID
	if v.source.Explain != nil {
		for _, sp := range v.source.Explain.Spaces() {
			if sp.Open && (name == "" || name == hex.EncodeToString(sp.Fingerprint[:])) {
				found = append(found, sp.ID)
			}
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("space: %q fits %d open spaces, allowed: the fingerprint of one", name, len(found))
	}
	return found[0], nil
}
