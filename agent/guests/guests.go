// Package guests joins what plugs into an agent's core: transfers between engines and other agents,
// hints, KV events, explanations, and the view of all that HTTP serves.
package guests

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/agent/raise"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// MaxKeepPercent bounds Options.KeepPercent, so that blocks of other requests find room.
const MaxKeepPercent = 50

// Agent is the core that the guests plug into.
type Agent interface {
	admin.Agent
	// Directory returns the socket directory, and the group of its sockets.
	Directory() (path string, group int)
	// Loads reports whether loads are on.
	Loads() bool
	// OpenSpace returns the pool's number and the epoch of a space that other agents may read.
	OpenSpace(fp pool.Fingerprint) (id pool.SpaceID, epoch uint32, ok bool)
	// Open returns the description and the rules of the open space with the pool's number; nil:
	// there is none.
	Open(s pool.SpaceID) (*pool.Spec, *lookup.Space)
	// Unserved reports whether something that engines of a space had sent was not served.
	Unserved(s pool.SpaceID) bool
}

// Options configure the guests.
type Options struct {
	HTTP        admin.Options // but for the directory and the log
	Peers       Peers
	KeepPercent int              // of the pool, that blocks may take that hints pin; 0: none are pinned
	Ranks       bool             // the pool's policy of eviction follows advice
	Tokens      string           // folder for the tokens that KV events need, which the next process reads; empty: none
	History     *history.History // what /explain is made from; nil: nothing is remembered
}

// Peers connects an agent with those of other nodes. The zero value is an agent on its own.
type Peers struct {
	Address string // host:port where other agents reach this one; empty: they cannot
	// TransferTTL is how long a transfer lasts that no OFFER gave a time; 0: delivery.DefaultTTL.
	TransferTTL time.Duration
	// Fetch brings the blocks of a request from another agent, until nothing more comes or ctx
	// ends. nil: other agents are not asked.
	Fetch func(ctx context.Context, r *delivery.Request) error
	// Deliver tells another agent, without waiting, that a transfer was delivered; nil: none is
	// told.
	Deliver func(peer string, space pool.Fingerprint, name string)
	Report  func() *admin.PeersStatus // nil: an agent on its own
	// Leave ends all fetches, and waits for no other agent; nil: there are none.
	Leave func() error
	// Stop ends the service to other agents before a successor may start; nil: there is none.
	Stop func() error
}

// Guests are an agent's guests: its agent.Guests.
type Guests struct {
	Agent
	*raise.Raiser
	o         Options
	pool      pool.Memory
	log       *zap.Logger
	transfers *delivery.Table
	hints     *hints.Ledger
	events    *events.Desk
	view      *admin.View
	web       *admin.Server // nil before Start
}

// Join makes the guests of an agent and its pool. They begin with the agent, and end with it.
func Join(a Agent, p pool.Memory, o Options, log *zap.Logger) *Guests {
	tiers, _ := p.(pool.Tiers)
	o.HTTP.Dir, o.HTTP.SocketGroup = a.Directory()
	o.HTTP.Log = log
	g := &Guests{Agent: a, o: o, pool: p, log: log}
	promised := delivery.Config{
		TTL: o.Peers.TransferTTL, Fetch: o.Peers.Fetch, Deliver: o.Peers.Deliver,
		Address: o.Peers.Address, Index: p, Epoch: p.Epoch, Unserved: a.Unserved,
	}
	if tiers != nil {
		promised.Shared = tiers.Shared
	}
	g.transfers = delivery.New(promised)
	g.Raiser = raise.New(raise.Config{Index: p, Tiers: tiers, Windowed: g.windowed, Committed: g.transfers.Committed})
	capacity := p.Stats().Capacity
	told := hints.Config{
		Memory: p, Capacity: capacity, PinBudget: capacity / 100 * int64(o.KeepPercent), Ranks: o.Ranks,
	}
	var storage pool.Journal
	if tiers != nil {
		told.Raise, storage = g.Raise, tiers.Storage()
	}
	if o.Peers.Fetch != nil {
		told.Fetch = g.fetchHinted
	}
	g.hints, g.events = hints.New(told), events.New(p, storage, o.Tokens, log)
	sources := admin.Sources{Guests: g.Report, Hints: g.hints, Explain: g.world(tiers)}
	g.view = admin.NewView(a, sources)
	return g
}

// Start starts HTTP.
func (g *Guests) Start() (err error) {
	g.web, err = admin.Start(g.view, g.o.HTTP)
	return err
}

// Close ends the fetches from other agents, without waiting for these, as does the service to them;
// nothing is kept for requests any more, and no events are told; then HTTP ends.
func (g *Guests) Close() {
	if g.o.Peers.Leave != nil {
		g.closed("fetches from other agents", g.o.Peers.Leave())
	}
	g.transfers.Close()
	if g.o.Peers.Stop != nil {
		g.closed("peer listener", g.o.Peers.Stop())
	}
	g.hints.Close()
	g.events.Close()
	if g.web != nil {
		g.web.Close()
	}
}

// closed logs an error of a close; nothing else can be done about it.
func (g *Guests) closed(what string, err error) {
	if err != nil {
		g.log.Error("not closed", zap.String("what", what), zap.Error(err))
	}
}

// Transfers returns the agent's transfers, for the listener of other agents.
func (g *Guests) Transfers() *delivery.Table { return g.transfers }

// Status returns the contents of /status.
func (g *Guests) Status() admin.Status { return g.view.Status() }

// Report returns what the guests tell of themselves.
func (g *Guests) Report() admin.Guests {
	out := admin.Guests{Hints: g.hints.Report(), Events: g.events.Report(), Transfers: g.transfers.Report()}
	if p := &g.o.Peers; p.Report != nil {
		out.Peers = p.Report()
		out.Peers.Address = p.Address
	}
	return out
}

// Serve implements agent.Guests, as do those below.
func (g *Guests) Serve(session uint64, rules *lookup.Space, msg any, waiting int, send func(any)) bool {
	return g.transfers.Serve(session, rules, msg) || g.hints.Serve(rules, msg, send) ||
		g.events.Serve(session, rules, msg, waiting, send)
}

// Left ends what a session holds, and what it is told.
func (g *Guests) Left(session uint64) {
	g.transfers.EndSession(session)
	g.events.Leave(session)
}

// Reset drops what is kept of a space.
func (g *Guests) Reset(fp pool.Fingerprint, at time.Time, by string) {
	g.events.Forget(fp)
	g.o.History.WasReset(history.Reset{At: at, Space: fp, By: by})
}

// Saved remembers the blocks of a save that were not stored, and wakes those who wait for the
// others.
func (g *Guests) Saved(fp pool.Fingerprint, rules *lookup.Space, sections []transfer.Section, status []pool.Status) {
	for i := range sections {
		one := &sections[i]
		g.o.History.Refused(fp, one.Group, one.Hashes, status)
		status = status[one.Hashes.N:]
	}
	if rules != nil {
		g.transfers.Committed(rules.ID)
	}
}

// Expire ends transfers, fetches and hints that have reached their time.
func (g *Guests) Expire() {
	g.transfers.Expire()
	g.hints.Expire()
}

// Expect returns what may still come for a transfer.
func (g *Guests) Expect(req *ipc.LookupRequest, rules *lookup.Space, q *lookup.Query, spec *pool.Spec) lookup.Expected {
	return g.transfers.Expect(req, rules, q, spec)
}

// Answered remembers a look-up.
func (g *Guests) Answered(fp pool.Fingerprint, hashTokens uint32, req *ipc.LookupRequest, reply *ipc.LookupReply) {
	g.o.History.Answered(fp, hashTokens, req, reply)
}

// Awaited reports whether a transfer of a space is open.
func (g *Guests) Awaited(s pool.SpaceID) bool { return g.transfers.Awaited(s) }

var errNotOpen = errors.New("the space is not open")

// fetchHinted starts to fetch blocks from another agent.
func (g *Guests) fetchHinted(s pool.SpaceID, name, peer string, chains []hints.Chain) (<-chan struct{}, error) {
	spec, _ := g.Open(s)
	if spec == nil {
		return nil, errNotOpen
	}
	wanted := make([]delivery.Chain, len(chains))
	for i := range chains {
		wanted[i] = delivery.Chain{Group: chains[i].Group, Hashes: chains[i].Hashes}
	}
	return g.transfers.Bring(peer, name, s, spec, wanted, func(group uint8) bool { return g.windowed(s, group) })
}

// windowed reports whether a group of a space has a sliding window.
func (g *Guests) windowed(s pool.SpaceID, group uint8) bool {
	_, rules := g.Open(s)
	return rules != nil && int(group) < len(rules.Groups) && rules.Groups[group].Window != 0
}

// world returns the agent as explanations read it; nil if nothing is remembered.
func (g *Guests) world(tiers pool.Tiers) *history.World {
	if g.o.History == nil {
		return nil
	}
	w := &history.World{
		History: g.o.History, Spaces: g.Spaces, Index: g.pool, Memory: g.pool, Loads: g.Loads,
	}
	if tiers != nil {
		w.Ask = func(s pool.SpaceID, group uint8, h pool.Hashes, deadline time.Time) {
			tiers.Ask(s, []pool.Asked{{Group: group, Hashes: h, Sparse: true}}, deadline, false)
		}
	}
	return w
}
