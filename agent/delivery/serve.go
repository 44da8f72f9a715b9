package delivery

import (
	"errors"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// Serve serves OFFER, OFFERED and DELIVERED of a session, with the rules of its space, or nil if it
// has none that is open: then the message is counted. It returns false for another message.
func (t *Table) Serve(session uint64, rules *lookup.Space, msg any) bool {
	if rules == nil {
		switch msg.(type) {
		case *ipc.Offer, *ipc.Offered, *ipc.Delivered:
			t.mu.Lock()
			defer t.mu.Unlock()
			t.mu.count.Ignored++
			return true
		}
		return false
	}
	switch m := msg.(type) {
	case *ipc.Offer:
		t.Offer(rules.ID, m.Name, session, m.Tokens, time.Duration(m.TTLMS)*time.Millisecond)
	case *ipc.Offered:
		t.Offered(rules.ID, m.Name, session, m.Tokens)
	case *ipc.Delivered:
		t.Delivered(rules.ID, m.Name)
	default:
		return false
	}
	return true
}

// maxFetchBlocks bounds the blocks of one fetch, of all groups together.
const maxFetchBlocks = ipc.MaxHashes

// Expect returns what may still come for the transfer that a look-up names. The first look-up that
// names another agent starts a fetch from it.
func (t *Table) Expect(req *ipc.LookupRequest, rules *lookup.Space, q *lookup.Query, spec *pool.Spec) (
	x lookup.Expected) {
	x.Most = lookup.Limit(rules, q)
	if req.Peer != "" && req.Peer != t.cfg.Address && t.cfg.Fetch != nil {
		x.Grows = t.fetching(req, rules, q, spec, x.Most)
		return x
	}
	if x.Most <= q.HBMTokens {
		return lookup.Expected{} // the engine has all of it
	}
	tr, unheard := t.State(rules.ID, req.Transfer), false
	if tr.State == Unknown && !req.Early {
		// The prefill engine has answered, so its OFFER was sent before this look-up, over another
		// socket: it was served by now, or waits there.
		unheard = t.cfg.Unserved(rules.ID)
		tr = t.State(rules.ID, req.Transfer)
	}
	switch tr.State {
	case Open:
		x.Grows = true
		if tr.Tokens > 0 {
			x.Most = min(x.Most, tr.Tokens)
		}
	case Unknown:
		x.Anew = t.cfg.Shared != nil && t.cfg.Shared()
		x.Grows = unheard || x.Anew || req.Early
	}
	return x
}

// fetching reports whether the blocks of the transfer that a look-up names are being fetched from
// another agent. The first look-up starts that; if this agent and the engine lack none, the other
// agent is only remembered, to be told of the delivery.
func (t *Table) fetching(req *ipc.LookupRequest, rules *lookup.Space, q *lookup.Query, spec *pool.Spec,
	most uint32) bool {
	if running, known := t.Fetching(rules.ID, req.Transfer, req.Peer, req.Session); known {
		return running
	}
	r := &Request{
		Peer: req.Peer, Name: string(req.Transfer), Early: req.Early,
		Fingerprint: spec.Fingerprint, Space: rules.ID, Epoch: t.cfg.Epoch(rules.ID), Shards: spec.Shards,
	}
	left := maxFetchBlocks
	for i := range rules.Groups {
		if !q.Asks(uint8(i)) {
			continue
		}
		g := &rules.Groups[i]
		h := rules.Blocks(q.Hashes, uint8(i), 0, uint64(most))
		r.lacking(t.cfg.Index, uint8(i), h, min(int(q.HBMTokens/g.BlockTokens), h.N), g.Window != 0, &left)
	}
	return t.Start(r, req.Session)
}

var errNotFetched = errors.New("too many fetches run")

// Bring starts to fetch chains from another agent, as a look-up that names a transfer does. The
// channel is closed when the fetch is over.
func (t *Table) Bring(peer, name string, s pool.SpaceID, spec *pool.Spec, chains []Chain,
	windowed func(group uint8) bool) (<-chan struct{}, error) {
	r := &Request{
		Peer: peer, Name: name, Fingerprint: spec.Fingerprint, Space: s, Epoch: t.cfg.Epoch(s), Shards: spec.Shards,
	}
	left := maxFetchBlocks
	for _, c := range chains {
		r.lacking(t.cfg.Index, c.Group, c.Hashes, 0, windowed(c.Group), &left)
	}
	if _, known := t.Fetching(s, []byte(name), peer, 0); !known {
		t.Start(r, 0)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.mu.fetches[Key{s, name}]; f != nil {
		return f.ended, nil
	}
	return nil, errNotFetched
}
