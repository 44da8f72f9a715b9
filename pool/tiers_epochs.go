package pool

import (
	"context"
	"crypto/sha256"
)

// SpaceUse is what Tiers can do besides: hear which spaces engines use, and tell of resets that
// came from other nodes. None of its methods waits for a disk or a store.
type SpaceUse interface {
	// InUse tells that an engine of a space is here, and which kind of generation its identity has.
	// What tiers have of a private one is collected a named time after NotInUse, unless InUse comes
	// before; of a named one, when no node has used it for a named time.
	InUse(f Fingerprint, g Generation)
	// NotInUse tells that the last engine of a space is gone.
	NotInUse(f Fingerprint)
	// OnAdopted names the function that is called, without any lock held, when a space that is open
	// got a new epoch because of a reset on another node; nil: nobody is.
	OnAdopted(then func(f Fingerprint))
}

// Generation is a kind of generations of weights, by who may be of the same space.
type Generation uint8

// The kinds. Engines that start begin with the base generation.
const (
	BaseGeneration    Generation = iota // every engine of equal files
	NamedGeneration                     // every engine that was given the name
	PrivateGeneration                   // no other engine, ever
)

// SpaceLister is what a Store can do besides: List of some spaces alone.
type SpaceLister interface {
	// ListSpaces calls found for every shard of the spaces. Now and then it calls looked with the
	// number of keys it has looked at since the last call, holding nothing that others wait for:
	// looked may take its time, and calls the store itself. An error of looked ends the list, and
	// is its error.
	ListSpaces(
		ctx context.Context, spaces []Fingerprint, looked func(n int) error, found func(k Key, bytes int64),
	) error
}

// Spaces that are reserved in shared stores: no engine's space has these names.
var (
	EpochMarkers = reserved("kvagent: markers of tier epochs")
	UseMarks     = reserved("kvagent: marks of use") // of named generations
)

func reserved(what string) Fingerprint {
	sum := sha256.Sum256([]byte(what))
	return Fingerprint(sum[:16])
}
