#include "bagualu/sim/engine.h"
