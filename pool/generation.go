package pool

import "crypto/sha256"

// Generation is a kind of weights generation, by which engines may share its space.
type Generation uint8

// An engine starts with the base generation.
const (
	BaseGeneration    Generation = iota // shared by all engines with equal files
	NamedGeneration                     // shared by all engines that were given its name
	PrivateGeneration                   // not shared
)

// Spaces reserved in shared stores: no engine's space has these fingerprints.
var (
	EpochMarkers = reserved("kvagent: markers of tier epochs")
	UseMarks     = reserved("kvagent: marks of use") // of named generations
)

func reserved(what string) Fingerprint {
	sum := sha256.Sum256([]byte(what))
	return Fingerprint(sum[:16])
}
