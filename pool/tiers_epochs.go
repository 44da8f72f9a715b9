package pool

import "crypto/sha256"

// Generation is a kind of generations of weights, by who may be of the same space.
type Generation uint8

// The kinds. Engines that start begin with the base generation.
const (
	BaseGeneration    Generation = iota // every engine of equal files
	NamedGeneration                     // every engine that was given the name
	PrivateGeneration                   // no other engine, ever
)

// Spaces that are reserved in shared stores: no engine's space has these names.
var (
	EpochMarkers = reserved("kvagent: markers of tier epochs")
	UseMarks     = reserved("kvagent: marks of use") // of named generations
)

func reserved(what string) Fingerprint {
	sum := sha256.Sum256([]byte(what))
	return Fingerprint(sum[:16])
}
