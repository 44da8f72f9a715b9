// Package ipc implements the protocol and its sockets: the look-up socket (ZeroMQ) and the session
// socket (Unix stream). It handles bytes, frames and peers, and knows nothing of pools, devices or
// engines. docs/PROTOCOL.md is its contract.
package ipc

import (
	"crypto/sha256"

	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Version is that of the session protocol and of the look-up's own form. There is no other.
const Version = 3

// Limits of the protocol. Beyond one, a message is malformed.
const (
	MaxFrame                  = 1 << 20 // bytes of a session frame
	MaxLookupBytes            = 4 << 20 // bytes of a look-up message, all frames
	MaxLookupFrames           = 16384
	MaxHashes                 = 65536 // in one look-up
	MaxHashLen                = 32
	MaxName                   = 128 // bytes of an instance, look-up or software name
	MaxText                   = 1024
	MaxIdentityPairs          = 64
	MaxIdentityBytes          = 16 << 10
	MaxGroups                 = 16
	MaxWorld                  = 64
	MaxShards                 = 256
	MaxRegions                = 4096  // of one registration
	MaxRegionsMessage         = 253   // of one REGIONS: the kernel passes at most that many descriptors
	MaxSegments               = 65536 // of one registration
	MaxSegmentsMessage        = 8192
	MaxSections               = 64
	MaxJobBlocks              = 8192
	MaxReleases               = 4096 // lease numbers in one RELEASE
	MaxHandle                 = 256  // bytes of a region's handle
	MaxEvents                 = 65536
	MaxSocketPath             = socketdir.MaxPath
	MaxTransferName           = 256      // bytes of a transfer's name
	MaxTransferMS             = 600000   // of a transfer's time to live
	MaxStageWords             = 1024     // of one worker
	MaxHintMS                 = 86400000 // of an action's time
	MaxHintActions            = 16       // of one HINT
	MaxHintID                 = 128      // bytes of an action's name, and of a session's
	MaxPriority               = 100
	MaxFinish                 = 4
	MaxPeerAddress            = 128       // bytes of the address of an agent's peer listener
	MaxSteps                  = 64        // decode steps in one STEPS
	MaxBudget                 = 1 << 46   // bytes of a BUDGET
	StepBytes                 = 12        // of one of them
	MaxExtra                  = 4096      // bytes of what a run's events have besides tokens
	MaxEventBlocks            = 4096      // of one BLOCK_EVENTS
	None               uint32 = 1<<32 - 1 // no event, no revocation word
)

// Kinds of actions in HINT.
const (
	HintRetain   = 1
	HintPin      = 2
	HintDemote   = 3
	HintDrop     = 4
	HintPrefetch = 5
	HintFetch    = 6
)

// States of actions in HINTED.
const (
	HintAccepted = 1
	HintClipped  = 2
	HintDeferred = 3
	HintRejected = 4
	HintMissing  = 5
)

// Kinds of runs in BLOCK_EVENTS.
const (
	EventStored  = 1
	EventRemoved = 2
)

// Media of blocks that the agent holds: in its memory, and on the node's disk below it.
const (
	MediumMemory  = 1
	MediumStorage = 2
)

// States in BLOCK_EVENTS.
const (
	EventsMore    = 0 // there is more to tell
	EventsWhole   = 1 // everything was told
	EventsRefused = 2 // nothing is told to this session
	EventsVoid    = 3 // nothing that was told holds: everything is told again from the beginning
)

// Roles of a session.
const (
	RoleScheduler = 0
	RoleWorker    = 1
)

// Kinds of regions.
const (
	RegionFD     = 1
	RegionPeer   = 2
	RegionCUDA   = 3
	RegionCUDAFD = 4
)

// Statuses of a registration, an unregistration and a reset.
const (
	RegDone    = 0
	RegRefused = 1
	RegClash   = 2
)

// Codes of ERROR.
const (
	ErrCodeVersion    = 1
	ErrCodeMalformed  = 2
	ErrCodePermission = 3
	ErrCodeLimit      = 4
	ErrCodeShutdown   = 5
	ErrCodeInternal   = 6
)

// LookupStatus is the status of an answer in the own form.
type LookupStatus uint8

// Statuses of look-ups.
const (
	LookupHit           LookupStatus = 0
	LookupPending       LookupStatus = 1
	LookupOff           LookupStatus = 2
	LookupNotRegistered LookupStatus = 3
	LookupMalformed     LookupStatus = 4
	LookupOverloaded    LookupStatus = 5
	LookupNoSession     LookupStatus = 6
	LookupLeaseCap      LookupStatus = 7
	LookupReady         LookupStatus = 8
)

// LookupWant is the purpose of a look-up in the own form.
type LookupWant uint8

// Purposes of look-ups.
const (
	WantProbe   LookupWant = 0
	WantReserve LookupWant = 1
	WantReady   LookupWant = 2 // reserve, and say whether the blocks can be loaded at once
)

// The messages of the session, one struct each; Encode takes and Decode returns pointers to them.
// Byte slices of decoded messages lie in the frame they came from. A field's tags are the limits of
// its value, or of its length in bytes or elements: least, or 0, and most, or what its type holds;
// each is the most of a list's numbers. name is its name in docs/PROTOCOL.md, unless that is the Go
// name in lower case with underscores.
type (
	// Hello opens a session.
	Hello struct {
		MinVersion, MaxVersion uint32 `least:"1"`
		Software               string `most:"MaxName"`
	}
	// Welcome answers Hello.
	Welcome struct {
		Version                          uint32 `least:"Version" most:"Version"`
		Boot                             [16]byte
		Session                          uint64
		MaxFrame, MaxJobBlocks, MaxQueue uint32
		LeaseBytes                       uint64
		Peer                             string `most:"MaxPeerAddress"` // empty: others cannot reach this agent
	}
	// Register declares one rank, or the scheduler, of an engine.
	Register struct {
		Req        uint32
		Instance   string      `least:"1" most:"MaxName"`
		Role       uint8       `most:"RoleWorker"`
		Rank       uint32      `most:"MaxWorld-1"`
		World      uint32      `least:"1" most:"MaxWorld"`
		Held       []uint32    `most:"MaxShards" each:"MaxShards-1"` // shards of a worker, ascending
		Shards     uint32      `least:"1" most:"MaxShards"`          // of a block
		Identity   []Pair      `most:"MaxIdentityPairs"`
		Groups     []GroupDesc `least:"1" most:"MaxGroups"`
		HashTokens uint32      `least:"1"`
		LookupName string      `most:"MaxName"`
		Sync       *SyncDesc   // nil: none
		Regions    uint32      `most:"MaxRegions"`  // how many are sent next
		Segments   uint32      `most:"MaxSegments"` // the same
	}
	// Pair is one entry of an identity.
	Pair struct {
		Key   string `least:"1" most:"MaxIdentityBytes"`
		Value string `most:"MaxIdentityBytes"`
	}
	// GroupDesc is one KV cache group.
	GroupDesc struct {
		BlockTokens       uint32 `least:"1"`
		NumBlocks, Window uint32
	}
	// SyncDesc places the words of a worker.
	SyncDesc struct {
		Region    uint32
		StepOff   uint64
		EventsOff uint64
		Events    uint32 `most:"MaxEvents"`
		RevokeOff uint64
		Revokes   uint32 `most:"MaxEvents"`
	}
	// Regions lists memory; its descriptors come with it, in order.
	Regions struct {
		Req  uint32
		List []RegionDesc `name:"regions" most:"MaxRegionsMessage"`
	}
	// RegionDesc is one region.
	RegionDesc struct {
		ID     uint32
		Kind   uint8 `least:"RegionFD" most:"RegionCUDAFD"`
		Size   uint64
		Addr   uint64
		Handle []byte `most:"MaxHandle"`
	}
	// Segments lists where a group's blocks lie.
	Segments struct {
		Req   uint32
		Shard uint32        `most:"MaxShards-1"`
		Group uint8         `most:"MaxGroups-1"`
		List  []SegmentDesc `name:"segments" most:"MaxSegmentsMessage"`
	}
	// SegmentDesc is one piece of every block.
	SegmentDesc struct {
		Region         uint32
		Offset, Stride uint64
		Bytes          uint32 `least:"1"`
	}
	// Registered answers Register when all its parts have arrived.
	Registered struct {
		Req        uint32
		Status     uint8
		Text       string `most:"MaxText"`
		Space      [16]byte
		Epoch      uint32
		LookupPath string `most:"MaxSocketPath"`
	}
	// Unregister withdraws the registration.
	Unregister struct{ Req uint32 }
	// Unregistered answers Unregister when nothing touches the regions any more.
	Unregistered struct {
		Req    uint32
		Status uint8
		Text   string `most:"MaxText"`
	}
	// Release ends leases.
	Release struct {
		Leases []uint64 `most:"MaxReleases"`
	}
	// Section is a run of chained blocks of one group.
	Section struct {
		Group   uint8  `most:"MaxGroups-1"`
		Parent  []byte `most:"MaxHashLen"`
		HashLen uint8  `least:"1" most:"MaxHashLen"`
		Hashes  []byte `least:"1" most:"MaxJobHashes"`
		Blocks  []byte `least:"4" most:"MaxJobIDs"` // u32 LE each
	}
	// Save stores blocks.
	Save struct {
		Job      uint64
		Epoch    uint32
		Step     uint64
		Event    uint32
		Revoke   uint32
		Sections []Section `least:"1" most:"MaxSections"`
	}
	// Load delivers blocks.
	Load struct {
		Job      uint64
		Epoch    uint32
		Step     uint64
		Event    uint32
		Lease    uint64
		Sections []Section `least:"1" most:"MaxSections"`
	}
	// Stages declares the stages of a registered worker's segments, and Count words of 8 bytes at
	// Off of its sync region for its staged loads.
	Stages struct {
		Off   uint64
		Count uint32 `least:"1" most:"MaxStageWords"`
		// u16 LE: the stage of each segment, in the order of the registration
		List []byte `name:"stages" least:"2" most:"MaxStagesBytes"`
	}
	// StagedLoad delivers blocks stage by stage.
	StagedLoad struct {
		Job      uint64
		Epoch    uint32
		Step     uint64
		Event    uint32
		Lease    uint64
		Word     uint32    `most:"MaxStageWords-1"` // which word counts the stages
		Sections []Section `least:"1" most:"MaxSections"`
	}
	// Cancel ends a job.
	Cancel struct{ Job uint64 }
	// Cancelled answers Cancel after the job's Done.
	Cancelled struct{ Job uint64 }
	// Done reports the end of a job, with one status for each block of all sections.
	Done struct {
		Job    uint64
		Status []byte `name:"statuses" most:"MaxJobBlocks"`
	}
	// Reset starts a new weights epoch.
	Reset struct{ Req uint32 }
	// ResetDone answers Reset.
	ResetDone struct {
		Req    uint32
		Status uint8
		Text   string `most:"MaxText"`
		Epoch  uint32
	}
	// Epoch reports that another session or node reset the space.
	Epoch struct{ Epoch uint32 }
	// Offer opens a transfer in the registration's space, or renews it.
	Offer struct {
		Name   []byte `least:"1" most:"MaxTransferName"`
		Tokens uint32 // of the prompt, in whole blocks; 0: not known
		TTLMS  uint32 `name:"ttl_ms" least:"1" most:"MaxTransferMS"`
	}
	// Offered completes a transfer: nothing more will be stored for it.
	Offered struct {
		Name   []byte `least:"1" most:"MaxTransferName"`
		Tokens uint32 // that are stored
	}
	// Delivered ends a transfer: its receiver has it, or no longer wants it.
	Delivered struct {
		Name []byte `least:"1" most:"MaxTransferName"`
	}
	// Steps reports decode steps of a worker that have ended, the oldest first.
	Steps struct {
		// for each: age and time in us, requests; u32 LE
		List []byte `name:"steps" least:"StepBytes" most:"MaxStepsBytes"`
	}
	// Hint tells how blocks will be used: facts of the end of a request, and actions on blocks.
	Hint struct {
		Req     uint32
		Session string       `most:"MaxHintID"` // the client's; empty: not told
		Finish  uint8        `most:"MaxFinish"` // pool.Finish
		Output  uint32       // tokens that the request generated; 0: not told
		Actions []HintAction `most:"MaxHintActions"`
		Chains  []HintChain  `least:"1" most:"MaxGroups"`
	}
	// HintAction is one action on all chains of a HINT.
	HintAction struct {
		ID       string `most:"MaxHintID"` // the client's, for the receipt
		Kind     uint8  `least:"HintRetain" most:"HintFetch"`
		Priority uint8  `most:"MaxPriority"`         // of HintRetain
		MS       uint32 `name:"ms" most:"MaxHintMS"` // how long, or of HintDrop after how long; 0: not told
		Peer     string `most:"MaxPeerAddress"`      // host:port of the agent that has the blocks, of HintFetch
	}
	// HintChain is a run of chained blocks of one group.
	HintChain struct {
		Group   uint8  `most:"MaxGroups-1"`
		HashLen uint8  `least:"1" most:"MaxHashLen"`
		Hashes  []byte `least:"1" most:"MaxJobHashes"` // joined
		// a bit for each, from the lowest on: the session was the first to store it; empty: none
		Own []byte `most:"MaxJobBits"`
	}
	// Hinted answers a HINT that has actions, and again each time that one of them is over.
	Hinted struct {
		Req      uint32
		Receipts []HintReceipt `least:"1" most:"MaxHintActions"`
	}
	// HintReceipt says what became of one action.
	HintReceipt struct {
		ID     string `most:"MaxHintID"`
		Kind   uint8  `least:"HintRetain" most:"HintFetch"`
		State  uint8  `least:"HintAccepted" most:"HintMissing"`
		Blocks uint32
		Bytes  uint64
		Reason string `most:"MaxText"`
	}
	// Budget limits what the blocks that a worker's engine stores may take of the pool.
	Budget struct {
		Bytes uint64 `most:"MaxBudget"` // of them, that this worker holds; 0: any number
	}
	// BlockTokens has the tokens of a run of chained blocks.
	BlockTokens struct {
		Group   uint8  `most:"MaxGroups-1"`
		Parent  []byte `most:"MaxHashLen"` // hash of the block before the first; empty at the start of a prompt
		HashLen uint8  `least:"1" most:"MaxHashLen"`
		Hashes  []byte `least:"1" most:"MaxJobHashes"` // joined
		Tokens  []byte `least:"4" most:"MaxFrame"`     // u32 LE, of all blocks
		Extra   []byte `most:"MaxExtra"`               // returned as it is with each of the blocks
	}
	// NextEvents asks for the next events of the registration's space.
	NextEvents struct {
		Req    uint32
		Blocks uint32 `least:"1" most:"MaxEventBlocks"` // at most
		Anew   bool   // tell everything from the beginning
	}
	// BlockEvents answers NextEvents once there is something to tell.
	BlockEvents struct {
		Req   uint32     // of the NextEvents that it answers
		State uint8      `most:"EventsVoid"`
		Runs  []EventRun `most:"MaxEventBlocks"`
	}
	// EventRun has blocks that were stored, which are chained, or removed.
	EventRun struct {
		Kind    uint8  `least:"EventStored" most:"EventRemoved"`
		Medium  uint8  `least:"MediumMemory"`
		Group   uint8  `most:"MaxGroups-1"`
		Parent  []byte `most:"MaxHashLen"` // of the first stored block; empty at the start of a prompt
		HashLen uint8  `least:"1" most:"MaxHashLen"`
		Hashes  []byte `least:"1" most:"MaxEventHashes"` // joined
		Tokens  []byte `most:"MaxFrame"`                 // of stored blocks, u32 LE
		Extra   []byte `most:"MaxExtra"`                 // of each of the stored blocks
	}
	// Ping asks for a Pong.
	Ping struct{ Req uint32 }
	// Pong answers a Ping.
	Pong struct{ Req uint32 }
	// Error ends a session.
	Error struct {
		Code uint8
		Text string `most:"MaxText"`
	}
	// Switches reports what is switched on.
	Switches struct{ Loads, Saves bool }
)

// Form is the encoding of a look-up request.
type Form uint8

// The forms of docs/PROTOCOL.md section 2.
const (
	FormMalformed Form = iota
	FormOwn
	FormUpstream
	FormReset
	FormAscend2
	FormAscend3
	FormAscend4
	FormSimple
)

// LookupRequest is a look-up in any form. Slices lie in the received message or in the parser's
// memory: a handler keeps nothing of it.
type LookupRequest struct {
	Form       Form
	Space      [16]byte   // own form; zero: the socket's
	Session    uint64     // own form
	Want       LookupWant // own form
	Tokens     uint64
	HBMTokens  uint32
	DeadlineUS uint32
	Groups     []uint8 // nil: all (own), or [0] (foreign)
	HashLen    int     // 0 with no hashes
	Hashes     []byte  // joined
	// Of the own form. Peer and Early mean something only with a Transfer.
	Transfer []byte // its name; empty: none
	Peer     string // address of the agent that has it; empty: this agent, and the shared tiers
	Early    bool   // the transfer may not have been offered yet
}

// LookupReply answers any form. The simple form uses Blocks, all others Tokens.
type LookupReply struct {
	Status LookupStatus
	Tokens uint32
	Blocks uint64
	Lease  uint64
	Boot   [16]byte
	Disk   uint32 // of Tokens, those whose blocks are being fetched from the node's own tiers
	Shared uint32 // of Tokens, those whose blocks are being fetched from shared tiers

	Late bool // a tier had not answered in time; not sent
}

// AppendIdentity appends the canonical identity of the space that m registers for: the msgpack
// [identity, shards, hash_tokens, [[block_tokens, window], ...]] of docs/PROTOCOL.md.
func (m *Register) AppendIdentity(dst []byte) []byte {
	dst = appendArray(dst, 4)
	dst = appendArray(dst, len(m.Identity))
	for _, p := range m.Identity {
		dst = appendStr(appendStr(appendArray(dst, 2), p.Key), p.Value)
	}
	dst = appendUint(dst, uint64(m.Shards))
	dst = appendUint(dst, uint64(m.HashTokens))
	dst = appendArray(dst, len(m.Groups))
	for _, g := range m.Groups {
		dst = appendUint(appendUint(appendArray(dst, 2), uint64(g.BlockTokens)), uint64(g.Window))
	}
	return dst
}

// Space returns the fingerprint of that identity.
func (m *Register) Space() (space [16]byte) {
	sum := sha256.Sum256(m.AppendIdentity(nil))
	copy(space[:], sum[:])
	return space
}
